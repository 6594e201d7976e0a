__version__ = "0.1.0"

def __getattr__(name):
    "`fastaccum.GradientAccumulation` and all other names of `fastaccum.all`, which is imported when the first of them is asked for"
    if name.startswith('_'): raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    from importlib import import_module
    names = import_module('fastaccum.all')
    if name not in names.__all__: raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return getattr(names, name)
