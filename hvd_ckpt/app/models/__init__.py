"""Models as chains of blocks, the form that segments and the planner take.

Each module here builds an ``nn.Sequential`` whose children are the blocks, as small as the architecture allows. Use ``list(model)``
with ``checkpoint_sequential``. A tensor or a tuple of tensors passes from block to block. If blocks also share arguments, such as a
mask, the model is a :class:`~hvd_ckpt.parallel.pipeline.chain.Chain`, which gives them to each block.

    densenet, resnet, vnet, lstm, gpt
                     models written here, from their papers
    transformer, xlnet
                     models of ``transformers`` as chains: BERT, RoBERTa and GPT-2; XLNet
    hugging_face     models of ``transformers`` from a local folder
    catalog          names for the commands, with the kind of data, the builder, the options and the sizes of each model

Import the module you need. Nothing is imported here, so that only users of a model need its requirements, such as ``transformers``.
"""
