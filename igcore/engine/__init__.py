"""The decoding engine: token ids in, blocks of sampled tokens out."""
