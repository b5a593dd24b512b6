"""Triton's kernels compiled before anybody calls them: what `python -m fusedmlp.build` does for impl=triton."""
