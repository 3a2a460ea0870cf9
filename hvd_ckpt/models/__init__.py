"""Models as chains of blocks, the form that recomputation by segments takes.

Each module here gives an ``nn.Sequential`` whose children are the blocks, cut as finely as the architecture allows;
``list(model)`` is what ``checkpoint_sequential`` splits. Import the module you need: nothing is imported here, so that
a model's own requirements (``transformers``, say) are only met by those who use it.
"""
