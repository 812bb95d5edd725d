"""The PyTorch backend. The only package that imports torch when it is loaded."""
