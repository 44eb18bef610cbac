"""The command `anybatch` and everything behind it: data, models, recipes, training, run folders.

Nothing outside this package imports it, and it imports only the public names of `anybatch`,
its `units`, its `memory` and its `meter`.
"""
