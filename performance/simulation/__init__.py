"""The simulator: a load test in about a second, without a device and without a server.

main            the program, from the command line to the exit code
options         what to simulate, from the command line
setup           configuration, device and settings of one run
requests        what is asked and when: generated, from a trace, from a load test
workload        open loop, closed loop
server          the server on a virtual clock: the real scheduler, driven as the engine drives it
agent           the agent on a virtual clock: its queue, one step at a time
work            what a step makes a device do
device          what that costs, from rates (roofline)
presets         the rates of known devices, with their sources
fit             what that costs, learnt from steps that ran
spread          how far single steps lie from that, and for how long
recording       the steps of a flight recording
host            what the server process adds
runs, report    one run measured as a load test is; tables and JSON
rate            the highest rate that keeps the objectives
validate        simulation against load test
batching        the study of batching modes, simulated
"""
