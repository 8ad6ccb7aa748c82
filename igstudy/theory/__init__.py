"""The theory of the paper on finite MDPs; numpy only."""
