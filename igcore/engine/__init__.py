"""The decoding engine: token ids in, candidate blocks out."""
