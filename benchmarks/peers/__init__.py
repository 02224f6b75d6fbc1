"""The contenders of `benchmarks.compare`: a module for each, run as a process in an environment of its own."""
