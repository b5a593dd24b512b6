"""fusedmlp: swap GELU, softmax, Linear+GELU and MLP implementations in a real training loop."""

__version__ = "0.1.0"
