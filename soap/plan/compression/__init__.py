"""Sizes of compressed messages, and which parameters are worth compressing; one file a method. No tensors and no costs."""
