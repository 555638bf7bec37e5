/* Reads the machine's description, keeps the ledger of GPU memory and writes the log; see machine.h.
 *
 * The description, one thing a line (sizes in MiB; a name may contain blanks and ends with the line):
 *
 *   gpu NUMBER UUID MEMORY SPEED NAME
 *   part NUMBER UUID MEMORY SPEED NAME     a MIG instance of GPU NUMBER
 *   holder NUMBER PID MEMORY               a process of somebody else on GPU NUMBER
 *   fail FUNCTION CODE [NUMBER]            FUNCTION returns CODE, everywhere or for GPU NUMBER
 *   context MEMORY                         taken by each process on each GPU it opens a context on (default 256)
 *   pinned MEMORY                          what each process may pin of the host's memory (default: no limit)
 *   driver VERSION
 */
#define _GNU_SOURCE
#include "machine.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB ((uint64_t)1 << 20)

static void read_gpu(struct machine *machine, const char *rest, bool part) {
    struct gpu gpu = {.part = part};
    unsigned long long memory_mib;
    if (machine->gpu_count == MAX_GPUS) return;
    if (sscanf(rest, "%d %95s %llu %d %95[^\n]", &gpu.number, gpu.uuid, &memory_mib, &gpu.speed, gpu.name) != 5) return;
    gpu.memory_bytes = memory_mib * MIB;
    machine->gpus[machine->gpu_count++] = gpu;
}

static void read_holder(struct machine *machine, const char *rest) {
    struct holder holder;
    unsigned long long mib;
    if (machine->holder_count == MAX_HOLDERS) return;
    if (sscanf(rest, "%d %d %llu", &holder.number, &holder.pid, &mib) != 3) return;
    holder.bytes = mib * MIB;
    machine->holders[machine->holder_count++] = holder;
}

static void read_failure(struct machine *machine, const char *rest) {
    struct failure failure = {.number = -1};
    if (machine->failure_count == MAX_FAILURES) return;
    if (sscanf(rest, "%95s %d %d", failure.function, &failure.code, &failure.number) < 2) return;
    machine->failures[machine->failure_count++] = failure;
}

void machine_read(struct machine *machine) {
    memset(machine, 0, sizeof *machine);
    machine->context_bytes = 256 * MIB;
    machine->pinned_bytes = UINT64_MAX;
    strcpy(machine->driver_version, "580.95.05");
    const char *path = getenv("STANDIN_MACHINE");
    FILE *file = path ? fopen(path, "re") : NULL;
    if (!file) return;
    char line[512], word[16];
    int length;
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%15s%n", word, &length) != 1) continue;
        const char *rest = line + length;
        unsigned long long mib;
        if (!strcmp(word, "gpu")) read_gpu(machine, rest, false);
        else if (!strcmp(word, "part")) read_gpu(machine, rest, true);
        else if (!strcmp(word, "holder")) read_holder(machine, rest);
        else if (!strcmp(word, "fail")) read_failure(machine, rest);
        else if (!strcmp(word, "context") && sscanf(rest, "%llu", &mib) == 1) machine->context_bytes = mib * MIB;
        else if (!strcmp(word, "pinned") && sscanf(rest, "%llu", &mib) == 1) machine->pinned_bytes = mib * MIB;
        else if (!strcmp(word, "driver")) sscanf(rest, "%95s", machine->driver_version);
    }
    fclose(file);
}

int machine_failure(const struct machine *machine, const char *function, int number) {
    for (int i = 0; i < machine->failure_count; i++) {
        const struct failure *failure = &machine->failures[i];
        if (strcmp(failure->function, function)) continue;
        if (failure->number < 0 || failure->number == number) return failure->code;
    }
    return 0;
}

/* When a process started, in clock ticks since boot; 0 if it is gone, or a zombie, whose GPU memory is free again. */
static uint64_t started_ticks(pid_t pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0) return 0;
    text[size] = 0;
    const char *field = strrchr(text, ')'); /* the name of the process, field 2, may contain anything */
    if (!field || field[2] == 'Z' || field[2] == 'X') return 0;
    field += 2;
    for (int i = 3; i < 22 && field; i++) field = strchr(field + 1, ' ');
    return field ? strtoull(field, NULL, 10) : 0;
}

static bool ledger_path(char *path, size_t size, pid_t pid) {
    const char *folder = getenv("STANDIN_LEDGER");
    return folder && snprintf(path, size, "%s/%d", folder, pid) < (int)size;
}

struct account *ledger_open(void) {
    char path[4096];
    if (!ledger_path(path, sizeof path, getpid())) return NULL;
    int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file < 0) return NULL;
    void *memory = MAP_FAILED;
    if (!ftruncate(file, sizeof(struct account)))
        memory = mmap(NULL, sizeof(struct account), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return NULL;
    struct account *account = memory;
    account->started_ticks = started_ticks(getpid());
    return account;
}

static bool account_read(pid_t pid, struct account *account) {
    char path[4096];
    if (!ledger_path(path, sizeof path, pid)) return false;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    ssize_t size = read(file, account, sizeof *account);
    close(file);
    return size == sizeof *account && account->started_ticks && account->started_ticks == started_ticks(pid);
}

int ledger_users(const struct machine *machine, int row, struct usage *users, int limit) {
    int count = 0;
    for (int i = 0; i < machine->holder_count && count < limit; i++) {
        const struct holder *holder = &machine->holders[i];
        if (machine->gpus[row].part || holder->number != machine->gpus[row].number || !started_ticks(holder->pid)) continue;
        users[count++] = (struct usage){holder->pid, holder->bytes};
    }
    const char *folder = getenv("STANDIN_LEDGER");
    DIR *entries = folder ? opendir(folder) : NULL;
    if (!entries) return count;
    for (struct dirent *entry; count < limit && (entry = readdir(entries));) {
        struct account account;
        if (!isdigit((unsigned char)entry->d_name[0])) continue;
        pid_t pid = atoi(entry->d_name);
        if (account_read(pid, &account) && account.bytes[row]) users[count++] = (struct usage){pid, account.bytes[row]};
    }
    closedir(entries);
    return count;
}

uint64_t ledger_used_bytes(const struct machine *machine, int row) {
    struct usage users[MAX_HOLDERS];
    uint64_t bytes = 0;
    int count = ledger_users(machine, row, users, MAX_HOLDERS);
    for (int i = 0; i < count; i++) bytes += users[i].bytes;
    return bytes;
}

void log_call(const char *function, const char *uuid, long number, int code) {
    const char *path = getenv("STANDIN_LOG");
    int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
    if (file < 0) return;
    char line[256];
    int size = snprintf(line, sizeof line, "%d %d %s %s %ld %d\n", getpid(), getppid(), function, uuid, number, code);
    ssize_t written = write(file, line, (size_t)size); /* one write of an appended line: lines do not mix */
    (void)written;
    close(file);
}
