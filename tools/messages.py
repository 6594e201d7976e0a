"""The warnings and errors of the package, taken from its code, and the section of *Troubleshooting* that the search finds for each"""
import ast, re
from functools import lru_cache
from pathlib import Path

package = Path(__file__).resolve().parent.parent/'fastaccum'

# A folder or a module -> the section for its messages, but for those that name another one. Of several that fit, the longest counts
sections = {
    '': 'an-error-before-training',
    'accumulation/witnesses': 'the-loss-is-off', 'accumulation/weigh': 'the-loss-is-off', 'core/chunks': 'the-loss-is-off',
    'core/losses': 'the-loss-is-off', 'core/measured': 'the-loss-is-off',
    'core/terms': 'the-loss-is-off', 'core/values': 'the-loss-is-off',
    'accumulation/remainder': 'the-remainder-steps-with-fewer-items-or-more',
    'accumulation/plan': 'the-remainder-steps-with-fewer-items-or-more',
    'accumulation/witnesses/steps': 'the-remainder-steps-with-fewer-items-or-more',
    'accumulation/witnesses/unsplit': 'the-remainder-steps-with-fewer-items-or-more',
    'memory': 'out-of-memory', 'core/memory': 'out-of-memory', 'accumulation/fitting': 'out-of-memory',
    'precision': 'overflow-in-fp16', 'core/scaler': 'overflow-in-fp16',
    'core/lockstep': 'batchnorm-sees-less-than-the-effective-batch',
    'accumulation/witnesses/norms': 'batchnorm-sees-less-than-the-effective-batch',
    'accumulation/witnesses/buffers': 'batchnorm-sees-less-than-the-effective-batch',
    'core/coupled': 'a-batch-that-cannot-be-split', 'core/microbatch': 'a-batch-that-cannot-be-split',
    'core/untouched': 'a-batch-that-cannot-be-split', 'core/watch': 'a-batch-that-cannot-be-split',
    'logs/wandb': 'steps-in-weights-biases', 'checkpoint': 'a-run-does-not-resume', 'parallel': 'errors-of-several-ranks'}

# Programs, whose texts are no messages of a fit
programs = {'conformance', 'demo'}

def literal(node):
    "The text of a string, with `…` for what it is given"
    return node.value if isinstance(node, ast.Constant) else ''.join(v.value if isinstance(v, ast.Constant) else '…' for v in node.values)

def strings(tree):
    "All strings of a module but docstrings, whole"
    nodes = [*ast.walk(tree)]
    docs = {id(n.body[0].value) for n in nodes if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)) and n.body
            and isinstance(n.body[0], ast.Expr)}
    parts = {id(v) for n in nodes if isinstance(n, ast.JoinedStr) for v in n.values if isinstance(v, ast.Constant)}
    left_out = docs|parts
    return [n for n in nodes if (isinstance(n, ast.JoinedStr) or isinstance(n, ast.Constant) and isinstance(n.value, str))
            and id(n) not in left_out]

def is_message(text):
    "Is it a sentence? Lists of names are none"
    return len(re.findall(r"(?<!\S)[\"'(]*[A-Za-z-]+[\"'),.:;?]*(?!\S)", text)) > 3

def section_of(name):
    "The section for the messages of a module"
    return sections[max((k for k in sections if f'{name}/'.startswith(f'{k}/'*bool(k))), key=len)]

def in_module(tree, name):
    "The messages in the code of a module, each with its section"
    named = {}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or getattr(call.func, 'id', getattr(call.func, 'attr', '')) not in ('warn', 'warn_once'): continue
        texts = strings(call)
        pages = [n.value.partition('#')[2] for n in texts if isinstance(n, ast.Constant) and n.value.startswith('troubleshooting.html#')]
        named.update({id(n): pages[0] for n in texts if pages})
    return {literal(n): named.get(id(n), section_of(name)) for n in strings(tree) if is_message(literal(n))}

@lru_cache
def messages():
    "Each message of the package, and its section"
    found = {}
    for f in sorted(package.rglob('*.py')):
        name = f.relative_to(package).with_suffix('').as_posix().removesuffix('/__init__')
        if name not in programs|{'_modidx'}: found.update(in_module(ast.parse(f.read_text(encoding='utf-8')), name))
    return found
