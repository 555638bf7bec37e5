/* The machine that the stand-in plays: its GPUs, who holds memory on them, and a log of what was called.
 *
 * Linked into the driver (driver.c) and into NVML (nvml.c), which thereby agree on one machine. Everything is found
 * through three environment variables:
 *
 *   STANDIN_MACHINE  text file that lists the GPUs, see machine.c; read anew whenever something is asked
 *   STANDIN_LEDGER   folder with one file per process that has used a GPU: how many bytes it holds on which
 *   STANDIN_LOG      file to which calls are appended, one line each; nothing is logged where it is not set
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#pragma GCC visibility push(hidden)

enum { MAX_GPUS = 32, MAX_HOLDERS = 64, MAX_FAILURES = 64, TEXT = 96 };

struct gpu {
    int number; /* NVML's index; of a MIG instance, that of the GPU it is a part of */
    bool part;  /* a MIG instance: found by its UUID alone */
    int speed;  /* CUDA numbers GPUs by falling speed unless CUDA_DEVICE_ORDER says PCI_BUS_ID */
    uint64_t memory_bytes;
    char uuid[TEXT];
    char name[TEXT];
};

/* A process that is not run on the stand-in but is said to hold memory of a GPU for as long as it lives. */
struct holder {
    int number;
    pid_t pid;
    uint64_t bytes;
};

/* A function that is to return an error, on every GPU (number -1) or on one. */
struct failure {
    char function[TEXT];
    int code;
    int number;
};

struct machine {
    struct gpu gpus[MAX_GPUS];
    int gpu_count; /* rows of gpus, parts included */
    struct holder holders[MAX_HOLDERS];
    int holder_count;
    struct failure failures[MAX_FAILURES];
    int failure_count;
    uint64_t context_bytes; /* what a process takes of a GPU by opening a context there */
    uint64_t pinned_bytes;  /* what a process may pin of the host's memory */
    char driver_version[TEXT];
};

/* What one process holds, in bytes by row of machine.gpus; mapped into that process, read by all others. */
struct account {
    uint64_t started_ticks; /* of the process, so that a later one of the same number is not taken for it */
    uint64_t bytes[MAX_GPUS];
};

struct usage {
    pid_t pid;
    uint64_t bytes;
};

void machine_read(struct machine *machine);

/* The code that a function is to fail with, 0 where it is not. Number -1 stands for no particular GPU. */
int machine_failure(const struct machine *machine, const char *function, int number);

/* The account of this process, created where there is none; NULL where it cannot be. */
struct account *ledger_open(void);

/* Who holds memory of a GPU (a row of machine.gpus), this process and holders included; returns how many. */
int ledger_users(const struct machine *machine, int row, struct usage *users, int limit);

uint64_t ledger_used_bytes(const struct machine *machine, int row);

/* One line of the log: process, its parent, the function, the GPU's UUID or "-", a number, the code returned. */
void log_call(const char *function, const char *uuid, long number, int code);

#pragma GCC visibility pop
