"""A model as data: the operator graph, boxes of its tensors, types, and which parameters are sparse. No torch."""
