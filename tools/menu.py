"""The menu of the site, and the words by which its search finds pages that do not use them

A page is its path in `nbs`, without `.ipynb` and the number that a file of the API begins with. One that does not exist is left out."""

# Name -> a page; several pages; groups of tutorials that open, before those that stand nowhere else; the pages of the API
# for users; those that say what these are made of, after a page for who looks for them; or all that is left. Everything in
# the order in which a user needs it
menu = {
    'Home': 'index', 'Getting started': 'tutorials/getting_started', 'Recipes': 'recipes', 'By question': 'questions',
    'Troubleshooting': 'troubleshooting', 'Migrating from other libraries': 'coming_from',
    'How it works': 'tutorials/how_it_works', 'Benchmarks': 'benchmarks',
    'Works with': 'works_with', 'Glossary': 'glossary',
    'First steps': ['tutorials/bigger_batch', 'tutorials/any_gpu', 'tutorials/from_the_course',
                    'tutorials/token_losses', 'tutorials/when_not_to',
                    'tutorials/how_exact'],
    'Tutorials': {
        'Memory and precision': ['tutorials/fit_memory', 'tutorials/batchnorm', 'tutorials/contrastive', 'tutorials/optimizers',
                                 'tutorials/mixed_precision'],
        'Batch size': ['tutorials/find_batch_size', 'tutorials/anneal'],
        'Several devices, long runs': ['tutorials/many_devices', 'tutorials/stop_and_resume', 'tutorials/wandb'],
        'Models and callbacks': ['tutorials/pairs', 'tutorials/callbacks', 'tutorials/several_models']},
    'API reference': 'api/', '': '', 'Changelog': 'changelog', 'Contributing': ['contributing', 'internals']}

# The folders of the API; those that are not named follow
folders = ['api/' + o for o in ('accumulation', 'precision', 'batch_size', 'checkpoint', 'parallel', 'memory', 'logs', 'core', 'loop')]

# What the menu calls a page whose title is longer, or lacks the word that a user knows
names = {
    'tutorials/fit_memory': 'Fit it into memory: gradient checkpointing and more',
    'tutorials/many_devices': 'Multi-GPU',
    'contributing': 'How to contribute', 'tutorials/token_losses': 'Token losses and class weights',
    'tutorials/mixed_precision': 'Mixed precision: fp16 and bf16'}

# A page, or a section of it -> what users type who look for it, in words that it does not use
words = {
    'index#cite': 'citation bibtex reference paper',
    'coming_from': 'huggingface transformers pytorch-lightning mosaicml',
    'glossary': 'terms definitions vocabulary',
    'troubleshooting#the-loss-is-off': 'wrong loss not equal different',
    'troubleshooting#out-of-memory': 'OOM CUDA out of memory error',
    'troubleshooting#overflow-in-fp16': 'loss nan inf NaN infinite loss',
    'troubleshooting#steps-in-weights-biases': 'wandb steps wrong',
    'troubleshooting#slow-on-a-cpu': 'training is slower, slow training',
    'api/accumulation/callback#gradientaccumulation': 'accum_bs micro_batch_size n_acc',
    'tutorials/callbacks': 'early stopping EarlyStoppingCallback SaveModelCallback',
    'tutorials/contrastive': 'InfoNCE loss, in-batch negatives, triplet loss',
    'tutorials/pairs': 'DPO GRPO RLHF preference, position_ids, packing, cu_seqlens, variable resolution, multi-resolution',
    'tutorials/getting_started': 'install, installation, pip',
    'tutorials/wandb': 'wandb',
    'tutorials/several_models': 'two learners, two models, GAN',
    'tutorials/mixed_precision': 'loss nan inf amp autocast GradScaler half precision',
    'tutorials/bigger_batch': 'effective batch size, virtual batch size, gradient accumulation steps, large batch',
    'tutorials/bigger_batch#find-the-learning-rate': 'learning rate wrong after accumulation, lr too high, lr_find',
    'tutorials/bigger_batch#the-same-run': 'dropout batchnorm exact',
    'tutorials/find_batch_size': 'best batch size, optimal batch size, linear scaling rule',
    'tutorials/fit_memory': 'how many GB, GiB, VRAM, GPU memory estimate, memory usage, OOM, gradient checkpointing, offload',
    'tutorials/many_devices': 'multi-GPU, multiple GPUs, DDP, DistributedDataParallel, FSDP, torchrun, two GPUs',
    'tutorials/many_devices#when-your-cards-are-different': 'different GPUs, unequal GPUs, a faster and a slower GPU',
    'tutorials/token_losses#texts-of-different-lengths': 'batch size in tokens, dynamic batching, bucketing',
    'tutorials/fit_memory#long-texts': 'flash attention, sdpa, memory-efficient attention',
    'works_with#quantization': 'quantize int8 8-bit 4-bit QLoRA torchao',
    'works_with#distillation': 'knowledge distillation, teacher and student',
    'tutorials/stop_and_resume': 'resume training, checkpoint, continue, preempted, Colab timeout',
}
