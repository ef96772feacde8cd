"""What a newcomer can run and copy from: a model, and the demo that takes it from PyTorch to training on several processes."""
