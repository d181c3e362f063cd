"""Several models in one server: which of them are in memory, and the switch between versions of their weights.

Each model in memory has an engine of its own: a thread, a scheduler for each replica, and agents. An engine per model
isolates the models. A lost agent, a full queue or a slow grammar of one model does not touch the others. The engine
loop also stays as it is: one thread with all models would need the model's number in every command and every output.
The price is one more thread that shares Python's interpreter lock.
"""
