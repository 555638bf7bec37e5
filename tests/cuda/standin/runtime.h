/* What the three parts of the preloaded library share: runtime.c, libraries.c and collectives.c. */
#pragma once

#pragma GCC visibility push(hidden)

/* Find a function of the driver, which is loaded at the first call as the real runtime loads it; NULL without one. */
void *driver_symbol(const char *name);

/* The driver's function `name`, typed as cuda.h declares it (or extras.h), looked up once. */
#define DRIVER_TEXT(name) #name
#define DRIVER(name)                                                               \
    ({                                                                             \
        static __typeof__(&name) found_;                                           \
        if (!found_) found_ = (__typeof__(&name))driver_symbol(DRIVER_TEXT(name)); \
        found_;                                                                    \
    })

/* Initialise the driver and open a context on this thread's device, as whatever works on a device does at first.
 * Returns a cudaError_t, which cudaGetLastError then tells. */
int runtime_enter(void);

/* This thread's device. */
int runtime_device(void);

#pragma GCC visibility pop
