// The Python module `greedysnake._native`: two groups of bindings, nothing else.
#include "bind.h"

NB_MODULE(_native, m) {
    m.doc() = "I/O engine and optimizer kernels of GreedySnake; addresses and byte counts only.";
    bind_io(m);
    bind_kernels(m);
}
