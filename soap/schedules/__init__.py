"""Schedules of a pipeline as tables: what each stage computes, in which order. Pure data: no graph, no plan, no torch."""
