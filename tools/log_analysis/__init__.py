"""What a server's event log says, for people and for programs.

reader       lines of the log, whatever is in the file
records      the events that carry figures, with their types
timeline     values over time in bounded memory
analysis     one pass over the events: counts, distributions, the slowest requests
results      the same as JSON; the latency keys are those of the load test
story        the same in a few sentences
text         report on a terminal
html svg     report as one self-contained file
comparison   the log beside the load test's own figures
"""
