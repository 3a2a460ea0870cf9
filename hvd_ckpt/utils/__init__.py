"""Small tools for several rooms, which do not depend on training.

Values from outside, and texts:

    plain_data      JSON, YAML and ``NAME=VALUE``
    schema, states  schemas of values, and of state dicts
    named           functions and classes of the user's own modules
    folders         folders for output
    machine         the name, the processes and the memory of the machine
    text            names, sizes and progress
    extras          packages that are missing
    run_warnings    warnings of one line
    rules           what goes with what

Tensors and passes:

    memory, measure   peaks in exact bytes, and runs for measurements
    frames            which checkpointed region runs on this thread
    fingerprint       64 bits by which tensors are compared
    random_sources    generators and their states
    elementwise       optimizers that can update a part of a tensor
    cuts              slices of a parameter that a part has
    unmaterialized    parameters without values
    own_state         state of modules that each rank has of its own
    backward_errors   errors of one rank's backward pass, raised on all
    torch_private     private names of PyTorch

Time:

    spans   the seconds of each kind of work
    waits   waits for other processes
"""
