"""Execution of a plan with real tensors: one process (rank) per device, over ``torch.distributed``."""
