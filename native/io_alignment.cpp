// Apart from the rest because <linux/stat.h> and <sys/stat.h> do not go together.
#include <fcntl.h>
#include <linux/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "io_engine.h"

namespace greedysnake::io {

DirectAlignment direct_alignment(int fd) {
#ifdef STATX_DIOALIGN  // Linux 6.1
    struct statx info{};
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 && (info.stx_mask & STATX_DIOALIGN)) {
        return {true, info.stx_dio_mem_align, info.stx_dio_offset_align};
    }
#else
    (void)fd;
#endif
    return {false, 0, 0};
}

}  // namespace greedysnake::io
