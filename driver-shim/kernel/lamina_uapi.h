/* SPDX-License-Identifier: (GPL-2.0-only WITH Linux-syscall-note) OR Apache-2.0 */
/*
 * What a program may ask of /dev/laminaN.
 *
 * The device has two windows, base and views. A range of one is mapped into
 * the shared memory by LAMINA_IOC_MAP, which tells the offset at which to
 * mmap() it. That is for the open file alone: it ends with LAMINA_IOC_UNMAP,
 * or when the file is closed everywhere, and not while it is mmap()ed. A
 * machine has few mappings; files that ask for the same range share one.
 *
 * LAMINA_IOC_FLUSH and LAMINA_IOC_ASK need a file that is open for writing.
 */
#ifndef LAMINA_UAPI_H
#define LAMINA_UAPI_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define LAMINA_VERSION		1

/* Windows: the base can be stored to, views cannot. */
#define LAMINA_BASE		0
#define LAMINA_VIEWS		1

struct lamina_info {
	__u32 version;
	__u32 reserved;
	__u64 base_bytes;
	__u64 views_bytes;
	__u64 region_bytes;
};

/* Offset and length are multiples of the page size; "at" is the answer. */
struct lamina_map {
	__u32 window;
	__u32 reserved;		/* 0 */
	__u64 offset;
	__u64 length;
	__u64 at;
};

/* A range of the base window; length 0 is all from there on. */
struct lamina_range {
	__u64 offset;
	__u64 length;
};

/*
 * A request of the guest port, a line of JSON without its end, and room for
 * the answer. "total" is the length of the answer, of which as much as fits
 * is given.
 */
struct lamina_ask {
	__u64 request;
	__u64 answer;
	__u32 request_bytes;
	__u32 answer_bytes;
	__u64 total;
};

#define LAMINA_IOC_MAGIC	0xce
#define LAMINA_IOC_INFO		_IOR(LAMINA_IOC_MAGIC, 0, struct lamina_info)
#define LAMINA_IOC_MAP		_IOWR(LAMINA_IOC_MAGIC, 1, struct lamina_map)
#define LAMINA_IOC_UNMAP	_IOW(LAMINA_IOC_MAGIC, 2, __u64)
#define LAMINA_IOC_FLUSH	_IOW(LAMINA_IOC_MAGIC, 3, struct lamina_range)
#define LAMINA_IOC_ASK		_IOWR(LAMINA_IOC_MAGIC, 4, struct lamina_ask)

#endif
