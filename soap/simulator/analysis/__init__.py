"""What a schedule tells: which operators take the time, slack, traces, and comparisons with measured timelines."""
