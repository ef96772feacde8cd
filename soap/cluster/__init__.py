"""Clusters as data: devices, links and routes; read from YAML, known by name, or emulated. No torch."""
