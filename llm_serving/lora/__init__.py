"""LoRA adapters (Hu et al. 2021): small additions to the linear layers of the served model, chosen by each request.

``peft`` reads an adapter from the folder that the library PEFT writes. ``targets`` lists the linear layers that may
have an adapter. ``registry`` manages the loaded adapters and their slots. ``loading`` puts adapters into shared memory
for the agents.
"""
