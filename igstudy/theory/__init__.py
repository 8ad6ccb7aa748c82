"""The theory of the paper on finite MDPs, without PyTorch."""
