/* Open MPI waits in a loop around sched_yield(), which takes a core from the tests beside it. Preloaded, the wait sleeps. */
#include <time.h>

int sched_yield(void) {
    struct timespec pause = {0, 50000};
    nanosleep(&pause, 0);
    return 0;
}
