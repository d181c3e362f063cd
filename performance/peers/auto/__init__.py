"""Implements ``performance/compare_peers.py --auto``: installs the peers and compares this server with them.

main            creates what is missing, measures all programs in rounds, prints ratios, and draws the picture
programs        the programs: this server and its peers, with the format of the weights
environments    a virtual environment for each peer, with pinned packages
instruction_sets  limits all programs to an older instruction set (--isa)
model_files     the packaged model, converted to the format of each program
from_gguf       the conversion, which runs in the environment of OpenVINO
results         ratios of the rounds, and the table
picture         the bar chart of the documentation
"""
