"""The tables and figures of the u-cuDNN paper, chosen from parts that were measured."""
