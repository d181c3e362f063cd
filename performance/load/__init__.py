"""The load test: requests with given arrival times against a streaming HTTP API.

main            the program, from the command line to the exit code
options         the command line
arrivals        due times of requests
workload        prompts and output lengths
endpoint        the server's address
apis            the request and the stream of each API
http_client     keep-alive HTTP/1.1 connections that take little processor time, because the server shares the machine
timed_socket    a socket that knows when its bytes arrived
stream          records the time stamps of one streamed response
batch           sends each request when it is due, and waits for all of them
client          the run: connect, warm up, measure
closed_loop     a run in which each client waits for its previous request
progress        the display during a run
statistics      latencies, rates and counts of a run
report, plot    a run as a table, JSON and a picture
watches         the server's metrics, memory, and other processes' time during a run

server_process  starts a server for a benchmark
variants        compares the values of a setting
overload        loads a server far above its capacity
recorder        measures the cost of the flight recorder
"""
