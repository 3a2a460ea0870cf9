"""The checkpoint policy of each block of a model, for a memory budget: measure, solve, apply.

One file per step:

    budget        budgets as people think: 6GiB, 0.3x, 80%, min
    blocks        the chain of blocks in a model, and the arguments of each
    trace         the torch functions that a block calls
    candidates    sets of those calls that are worth dropping
    policy        checkpoint policies, and applying one to a module
    block_runner  bytes and seconds of a block by itself
    profile       all of that for a model, and what runs around its blocks
    chain         the model of a chain that the solver sees; ``simulate`` defines what a schedule of it costs
    solver        the fastest schedule within a budget
    plan          the decision, as data and as a JSON file; applying it
    planner       predict, measure, correct: from a model to a plan
    ranks         one plan for all ranks
    show          a plan as tables and pictures

and for pipeline stages:

    balance       cuts of a chain into parts
    schedule      the order of the passes of each rank
    stages        cuts and checkpoint policies together, for the memory of each stage

Import the module you need: nothing is imported here, so that reading a budget needs no PyTorch.
"""
