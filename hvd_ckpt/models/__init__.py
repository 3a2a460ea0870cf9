"""Models as chains of blocks, the form in which recomputation by segments and a planner take them, and what they learn.

Each model's module gives an ``nn.Sequential`` whose children are the blocks, cut as finely as the architecture allows;
``list(model)`` is what ``checkpoint_sequential`` splits. One tensor flows from block to block, or a tuple of them. Where blocks
also share arguments, such as a mask, the model is a ``Chain``, which hands these to every block and recomputes by itself if asked.

    chain            Chain: shared keyword arguments, ``checkpoint_interval``; WrappedChain: a model of ``transformers``
    densenet, resnet, vnet, lstm, gpt
                     models written here, from their papers
    bert, xlnet, gpt2
                     models of ``transformers`` as chains; bert has RoBERTa too
    hugging_face     the same from a local folder
    catalog          names for the commands: which kind of data a model is for, how it is built, its options and sizes
    objectives       Batch: inputs, targets and shared arguments of samples; its loss, metrics and weight, by kind of data

Import the module you need: nothing is imported here, so that a model's own requirements (``transformers``, say) are only met by
those who use it.
"""
