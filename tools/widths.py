"Code of a page in lines that fit it: the same code, with more line breaks"
import ast, io, re, textwrap, tokenize

words = 'for','if','and','or','else'     # before which a line may be broken
limit = 95     # characters; a browser would break longer lines anywhere, and go on at the left edge

def tokens(src): return list(tokenize.generate_tokens(io.StringIO(src).readline))

def with_long_lines(src, lines_for):
    """`src` with the long line of each comment and operator, the last first, in the lines that `lines_for(token, line)`
    gives, if it gives any"""
    lines = src.split('\n')
    for t in reversed(tokens(src)):
        row = t.start[0]-1
        if t.type in (tokenize.COMMENT, tokenize.OP) and len(lines[row]) > limit:
            lines[row:row+1] = lines_for(t, lines[row]) or [lines[row]]
    return '\n'.join(lines)

def indent_of(line): return re.match(' *', line)[0]

def own_lines(src):
    "`src` with the comment behind the code of a long line on a line of its own, before it"
    def lines_for(t, line):
        before = line[:t.start[1]].rstrip()
        if t.type == tokenize.COMMENT and before: return [indent_of(line) + t.string, before]
    return with_long_lines(src, lines_for)

def comments(src):
    "`src` with long comments in several lines"
    def lines_for(t, line):
        if t.type != tokenize.COMMENT or line[:t.start[1]].strip(): return
        indent = ' '*t.start[1] + '# '
        return textwrap.wrap(t.string[1:].strip(), limit, initial_indent=indent, subsequent_indent=indent)
    return with_long_lines(src, lines_for)

def bodies(src):
    "`src` with the body of a compound statement on a line of its own, where the line is long"
    lines,found = src.split('\n'),[]
    for node in ast.walk(ast.parse(src)):
        for name in ('body','orelse','finalbody'):
            group = getattr(node, name, None)
            if isinstance(group, list) and group and not isinstance(node, ast.Module):
                found.append((group[0].lineno-1, group[0].col_offset))
    for row,col in sorted(found, reverse=True):
        before,after = lines[row][:col].rstrip(),lines[row][col:]
        if len(lines[row]) <= limit or not before.endswith(':'): continue
        lines[row:row+1] = [before, f'{indent_of(before)}    {after}']
    return '\n'.join(lines)

def statements(src):
    "`src` with each of several statements of a long line on a line of its own"
    def lines_for(t, line):
        before,after = line[:t.start[1]].rstrip(),line[t.end[1]:].strip()
        if t.string == ';' and after: return [before, indent_of(line) + after]
    return with_long_lines(src, lines_for)

def bracketed(src):
    "`src` with the value of a long statement in brackets, where it has none of its own in which it can be broken"
    lines = src.split('\n')
    for node in ast.walk(ast.parse(src)):
        value = getattr(node, 'test' if isinstance(node, ast.Assert) else 'value', None)
        if not isinstance(node, (ast.Assert, ast.Assign, ast.Return,
                                 ast.Expr)) or value is None or value.lineno != value.end_lineno:
            continue
        line = lines[value.lineno-1]
        chain = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Call)
        if len(line) <= limit or not line.isascii() or not (
                chain or isinstance(value, (ast.Tuple, ast.BoolOp, ast.BinOp, ast.Compare, ast.IfExp))):
            continue
        a,b = value.col_offset,value.end_col_offset
        if isinstance(value, ast.Tuple) and line[a] == '(' and line[b-1] == ')': continue
        lines[value.lineno-1] = f'{line[:a]}({line[a:b]}){line[b:]}'
    return '\n'.join(lines)

def breaks(src):
    "`src` with its first long line broken within brackets, after a comma or before an operator; None if nothing can be broken"
    lines,stack,best,targets = src.split('\n'),[],{},False
    for t in tokens(src):
        targets = t.string == 'for' or targets and t.string != 'in'        # `for a,b in` stays together
        (row,col),(_,end) = t.start,t.end
        if t.type != tokenize.OP and t.string not in words: continue
        place = None
        if t.string in tuple('([{'): stack.append((row, end)); continue
        if t.string in tuple(')]}'): stack.pop(); continue
        if not stack or len(lines[row-1]) <= limit: continue
        if t.string == ',' and not targets: place = end
        elif t.type != tokenize.OP or t.string in ('+', '.', '==') and lines[row-1][:col].endswith((')', ' ')): place = col
        if place is None or place > limit or not lines[row-1][:place].strip() or not lines[row-1][place:].strip(): continue
        indent = len(indent_of(lines[row-1]))
        opened = indent if stack[-1][0] != row else stack[-1][1] if stack[-1][1] <= 55 else indent+4
        if place > opened and opened < limit-25: best.setdefault(row, []).append((len(stack), -place, opened))
    for row in sorted(best):
        _,place,opened = min(best[row])
        line = lines[row-1]
        lines[row-1:row] = [line[:-place].rstrip(), ' '*opened + line[-place:].lstrip()]
        return '\n'.join(lines)

def fitted(src):
    "The same code in lines of at most `limit` characters, where it has places to break them"
    if max(map(len, src.split('\n'))) <= limit: return src
    if src.startswith('%%'): return '\n'.join([src.partition('\n')[0], fitted(src.partition('\n')[2])])     # a file that is written
    try: tree = ast.dump(ast.parse(src))
    except SyntaxError: return src                        # a shell command, a magic
    src = bracketed(statements(bodies(comments(own_lines(src)))))
    while (more := breaks(src)) is not None: src = more
    assert ast.dump(ast.parse(src)) == tree, src
    return src
