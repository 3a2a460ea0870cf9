"""Models as chains of blocks, the form that segments and the planner take.

Each model's module gives an ``nn.Sequential`` whose children are the blocks, cut as finely as the architecture allows;
``list(model)`` is what ``checkpoint_sequential`` splits. One tensor flows from block to block, or a tuple of them. Where blocks
also share arguments, such as a mask, the model is a :class:`~hvd_ckpt.pipeline.chain.Chain`, which hands these to every block.

    densenet, resnet, vnet, lstm, gpt
                     models written here, from their papers
    bert, xlnet, gpt2
                     models of ``transformers`` as chains; bert has RoBERTa too
    hugging_face     the same from a local folder
    catalog          names for the commands: which kind of data a model is for, how it is built, its options and sizes

Import the module you need: nothing is imported here, so that a model's own requirements (``transformers``, say) are only met by
those who use it.
"""
