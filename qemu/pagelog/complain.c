// SPDX-License-Identifier: GPL-2.0-or-later
/* What the plugin reports of itself. */
#include <stdarg.h>
#include <stdio.h>

#include "pagelog.h"

/**
 * complain() - Print a line on standard error.
 * @format:	As for printf(), without a newline.
 */
void complain(const char *format, ...)
{
	char line[512];
	va_list values;

	va_start(values, format);
	vsnprintf(line, sizeof(line), format, values);
	va_end(values);
	fprintf(stderr, "plimsoll-pagelog: %s\n", line);
}
