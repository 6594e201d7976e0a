"Speed, memory, exactness and host syncs, measured next to a hand-written loop and to other libraries: `make bench`"
