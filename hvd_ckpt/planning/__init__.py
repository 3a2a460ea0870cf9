"""Planning: the checkpoint policy of each block of a model for a memory budget, found by measuring and solving.

One file per step:

    budget        memory budgets: 6GiB, 0.3x, 80%, min
    blocks        the chain of blocks in a model, and the arguments of each
    inputs        copies of arguments
    step          a training step, whose effects are undone
    trace         the torch functions that a block calls
    candidates    sets of these calls that are worth dropping
    policy        checkpoint policies and their application to modules
    head          the head of a language model and its cross entropy in chunks
    deferred      the logits of that head, in a model whose code stays as it is
    kinds         the policies of a block and their costs, each measured by itself
    profile       all of these for a model
    chain         the chain that the solver sees; ``simulate`` defines the cost of a schedule
    solver        the fastest schedule within a budget
    plan          the decision, as data and as a JSON file, and its application to a model
    planner       predict, measure, correct: from a model to a plan
    request       plans on request, with options and cache
    cache         plans of earlier processes
    ranks         one plan for all ranks

Import the module you need. Nothing is imported here, so that reading a budget needs no PyTorch.
"""
