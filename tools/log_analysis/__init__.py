"""Analyses a server's event log and reports the result to people and programs.

reader       the lines of the log; broken lines are counted
records      the events whose fields are analysed
timeline     values over time in bounded memory
totals       sums and distributions over a log
analysis     counts, distributions and the slowest requests, from one pass over the events
why_slow     the reasons why the slowest requests were slow; why_slow_report presents them
results      the analysis as JSON; the latency keys are those of the load test
story        the analysis in a few sentences
text         report on a terminal
html charts  report as one self-contained file
comparison   the log compared with the load test's figures
"""
