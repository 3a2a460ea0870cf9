"""Which block of a model keeps what, for a memory budget: measure, solve, apply.

One page per step:

    budget      budgets as people think
    blocks      the chain of blocks in a model, and what each is called with
    trace       what a block does, call by call
    cuts        sets of its calls that are worth dropping
    measure     bytes and seconds of a block by itself
    profile     all of that for a model, and what runs around its blocks
    chain       the model of a chain that the solver sees; what a schedule of it costs
    solver      the fastest schedule within a budget
    policy   what is done with a block, and how a module is made to do it
    plan        the decision, as data; applying it
    planner     the way from a model to a plan
    ranks       one plan for all ranks
    file        a plan as a JSON file
    draw        a plan as pictures
    command     ``hvd-ckpt plan``: its options
    session     and what it does

Import the module you need: nothing is imported here, so that reading a budget needs no PyTorch.
"""
