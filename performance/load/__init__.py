"""The load test: open-loop arrivals against a streaming HTTP API, measured from the time a request was due.

main            the program, from the command line to the exit code
options         what to do, from the command line
arrivals        when requests are due
workload        what they ask
endpoint        where the server is
apis            how each API is asked, and what a piece of its answer says
http_client     keep-alive HTTP/1.1 connections, as cheap as possible: client and server share the machine
discovery       which model a server serves
stream          one answer: server-sent events to time stamps
batch           sends each request when it is due, and waits for all answers
client          the run: reach the server, warm up, measure
progress        what the user sees meanwhile
statistics      the figures
report, plot    table, JSON, picture

server_process  a server of our own for the time of a benchmark
policies        two scheduling policies under the same load
"""
