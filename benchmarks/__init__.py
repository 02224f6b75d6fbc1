"""Benchmarks: every claim about speed, with the peer in the same run. `python -m benchmarks` lists them."""
