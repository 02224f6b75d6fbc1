"""The verbs of the `chairlift` command: each a dataclass whose fields are its flags and whose call is its work."""
