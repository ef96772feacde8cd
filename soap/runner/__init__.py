"""Making a single-device training script distributed in three lines: shards of its data, marked parameters, and a runner for its model.

The interface of Kim et al., "Parallax" (EuroSys 2019), for PyTorch modules: ``soap.shard``, ``soap.partitioner``, ``soap.get_runner``.
"""
