/* What the driver (driver.c) offers to the stand-in's other libraries, beside what the real one has. */
#pragma once

/* The code that a function of a library is to fail with on the present device, 0 where it is not. */
int standin_failure(const char *function);

/* Log a call of a library with the UUID of the present device; `device` -1, or the ordinal it is about. */
void standin_log(const char *function, int device, long number, int code);
