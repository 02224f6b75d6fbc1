"""Blocks of keys and values: who owns them, what they hold, what a prefix is worth. Knows no request."""
