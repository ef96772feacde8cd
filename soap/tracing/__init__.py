"""From exported PyTorch programs to operator graphs: tracing, operator rules, fusion, and execution of single tiles."""
