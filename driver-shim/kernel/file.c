// SPDX-License-Identifier: GPL-2.0-only
/*
 * /dev/laminaN: mappings, mmap() of them, and requests.
 *
 * What a file has mapped is its own to mmap(), and every mmap() holds that
 * file: so it stays until nobody can reach it. What a program unmaps before
 * that must not be in use. Files that have the same range share a mapping of
 * the device's. The device's end takes the memory out of all programs: they
 * get SIGBUS.
 */

#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "lamina.h"

struct lamina_file {
	struct lamina *lamina;
	struct file *file;
	struct list_head entry;		/* of lamina->files */
	struct list_head shares;
};

/*
 * A mapping of the device's. One without shares is there because the device
 * would not take it away: who asks for that range next has it, unless it is
 * not known whether it is there.
 */
struct lamina_mapping {
	struct list_head entry;		/* of lamina->mappings */
	u32 window;
	u64 offset;
	u64 length;
	u64 at;
	unsigned int shares;
	bool lost;
};

/* A file's share in one. */
struct lamina_share {
	struct list_head entry;
	struct lamina_mapping *mapping;
	/* Areas of programs that show it; -1 while it is taken away. */
	atomic_t uses;
};

static unsigned long lamina_place(u64 at)
{
	return at + BIT(LAMINA_ORDER);
}

static void lamina_forget(struct lamina *lamina,
			  struct lamina_mapping *mapping)
{
	gen_pool_free(lamina->places, lamina_place(mapping->at),
		      mapping->length);
	list_del(&mapping->entry);
	kfree(mapping);
}

/* The last of a device and its files. */
void lamina_release(struct kref *kref)
{
	struct lamina *lamina = container_of(kref, struct lamina, kref);
	struct lamina_mapping *mapping, *next;

	list_for_each_entry_safe(mapping, next, &lamina->mappings, entry)
		lamina_forget(lamina, mapping);
	if (lamina->places)
		gen_pool_destroy(lamina->places);
	kfree(lamina->request);
	kfree(lamina->response);
	kfree(lamina->text);
	kfree(lamina->piece);
	kfree(lamina);
}

/* Takes the region out of all programs, for good. */
void lamina_zap(struct lamina *lamina)
{
	struct lamina_file *open;

	mutex_lock(&lamina->lock);
	lamina->gone = true;
	list_for_each_entry(open, &lamina->files, entry)
		unmap_mapping_range(open->file->f_mapping, 0, 0, 1);
	mutex_unlock(&lamina->lock);
}

static int lamina_open(struct inode *inode, struct file *file)
{
	/* misc_open() left the device there, and holds off its end. */
	struct lamina *lamina =
		container_of(file->private_data, struct lamina, misc);
	struct lamina_file *open = kzalloc(sizeof(*open), GFP_KERNEL);

	if (!open)
		return -ENOMEM;
	open->lamina = lamina;
	open->file = file;
	INIT_LIST_HEAD(&open->shares);
	kref_get(&lamina->kref);
	mutex_lock(&lamina->lock);
	list_add(&open->entry, &lamina->files);
	mutex_unlock(&lamina->lock);
	file->private_data = open;
	return 0;
}

/* The mapping of a range, made now if there is none. */
static struct lamina_mapping *lamina_get(struct lamina *lamina,
					 const struct lamina_map *map)
{
	struct lamina_mapping *mapping;
	unsigned long place;
	int err;

	lockdep_assert_held(&lamina->map_lock);
	list_for_each_entry(mapping, &lamina->mappings, entry) {
		if (!mapping->lost && mapping->window == map->window &&
		    mapping->offset == map->offset &&
		    mapping->length == map->length) {
			mapping->shares++;
			return mapping;
		}
	}
	mapping = kzalloc(sizeof(*mapping), GFP_KERNEL);
	if (!mapping)
		return ERR_PTR(-ENOMEM);
	place = gen_pool_alloc(lamina->places, map->length);
	if (!place) {
		kfree(mapping);
		return ERR_PTR(-ENOSPC);
	}
	mapping->window = map->window;
	mapping->offset = map->offset;
	mapping->length = map->length;
	mapping->at = place - lamina_place(0);
	mapping->shares = 1;
	err = lamina_do(lamina, LAMINA_OP_MAP, map->window, map->offset,
			map->length, mapping->at);
	if (err) {
		gen_pool_free(lamina->places, place, map->length);
		kfree(mapping);
		return ERR_PTR(err);
	}
	list_add(&mapping->entry, &lamina->mappings);
	return mapping;
}

/* Gives up a share that is on no list any more. */
static int lamina_put(struct lamina *lamina, struct lamina_share *share)
{
	struct lamina_mapping *mapping = share->mapping;
	int err = 0;

	kfree(share);
	mutex_lock(&lamina->map_lock);
	if (!--mapping->shares) {
		err = lamina_do(lamina, LAMINA_OP_UNMAP, 0, 0, mapping->length,
				mapping->at);
		/* Without an answer it may be taken away at any time. */
		mapping->lost = err == -ETIMEDOUT || err == -EPROTO ||
				err == -ENODEV;
		/* If it failed, another one at that place would overlap. */
		if (!err || err == -ENOENT)
			lamina_forget(lamina, mapping);
	}
	mutex_unlock(&lamina->map_lock);
	return err;
}

static int lamina_close(struct inode *inode, struct file *file)
{
	struct lamina_file *open = file->private_data;
	struct lamina *lamina = open->lamina;
	struct lamina_share *share, *next;

	mutex_lock(&lamina->lock);
	list_del(&open->entry);
	mutex_unlock(&lamina->lock);
	list_for_each_entry_safe(share, next, &open->shares, entry)
		lamina_put(lamina, share);
	kfree(open);
	kref_put(&lamina->kref, lamina_release);
	return 0;
}

/* A file's share that has this range of the region, under lamina->lock. */
static struct lamina_share *lamina_find(struct lamina_file *open, u64 at,
					u64 length)
{
	struct lamina_share *share;

	list_for_each_entry(share, &open->shares, entry) {
		struct lamina_mapping *mapping = share->mapping;

		if (at >= mapping->at && length <= mapping->length &&
		    at - mapping->at <= mapping->length - length)
			return share;
	}
	return NULL;
}

static long lamina_map(struct lamina_file *open, struct lamina_map *map)
{
	struct lamina *lamina = open->lamina;
	struct lamina_mapping *mapping;
	struct lamina_share *share;

	if (map->reserved || map->window > LAMINA_VIEWS)
		return -EINVAL;
	/* The device checks the range; this is for the pool. */
	if (!map->length || !PAGE_ALIGNED(map->length))
		return -EINVAL;
	if (map->length > lamina->region.len)
		return -ERANGE;
	share = kzalloc(sizeof(*share), GFP_KERNEL);
	if (!share)
		return -ENOMEM;
	mutex_lock(&lamina->map_lock);
	mapping = lamina_get(lamina, map);
	mutex_unlock(&lamina->map_lock);
	if (IS_ERR(mapping)) {
		kfree(share);
		return PTR_ERR(mapping);
	}
	share->mapping = mapping;
	map->at = mapping->at;
	mutex_lock(&lamina->lock);
	list_add(&share->entry, &open->shares);
	mutex_unlock(&lamina->lock);
	return 0;
}

static long lamina_unmap(struct lamina_file *open, u64 at)
{
	struct lamina *lamina = open->lamina;
	struct lamina_share *share, *found = NULL;
	bool known = false;

	mutex_lock(&lamina->lock);
	list_for_each_entry(share, &open->shares, entry) {
		if (share->mapping->at != at)
			continue;
		known = true;
		if (!atomic_cmpxchg(&share->uses, 0, -1)) {
			found = share;
			list_del(&share->entry);
			break;
		}
	}
	mutex_unlock(&lamina->lock);
	if (!found)
		return known ? -EBUSY : -ENOENT;
	return lamina_put(lamina, found);
}

static long lamina_ioctl(struct file *file, unsigned int command,
			 unsigned long argument)
{
	struct lamina_file *open = file->private_data;
	struct lamina *lamina = open->lamina;
	void __user *user = (void __user *)argument;
	union {
		struct lamina_info info;
		struct lamina_map map;
		struct lamina_range range;
		struct lamina_ask ask;
		u64 at;
	} with = {};
	long err;

	if (_IOC_TYPE(command) != LAMINA_IOC_MAGIC ||
	    _IOC_SIZE(command) > sizeof(with))
		return -ENOTTY;
	if ((_IOC_DIR(command) & _IOC_WRITE) &&
	    copy_from_user(&with, user, _IOC_SIZE(command)))
		return -EFAULT;
	switch (command) {
	case LAMINA_IOC_INFO:
		with.info.version = LAMINA_VERSION;
		with.info.base_bytes = lamina->base_bytes;
		with.info.views_bytes = lamina->views_bytes;
		with.info.region_bytes = lamina->region.len;
		err = 0;
		break;
	case LAMINA_IOC_MAP:
		err = lamina_map(open, &with.map);
		break;
	case LAMINA_IOC_UNMAP:
		err = lamina_unmap(open, with.at);
		break;
	case LAMINA_IOC_FLUSH:
		if (!(file->f_mode & FMODE_WRITE))
			return -EBADF;
		err = lamina_do(lamina, LAMINA_OP_FLUSH, LAMINA_BASE,
				with.range.offset, with.range.length, 0);
		break;
	case LAMINA_IOC_ASK:
		/* Lines make and remove tensors. */
		if (!(file->f_mode & FMODE_WRITE))
			return -EBADF;
		err = lamina_talk(lamina, &with.ask);
		break;
	default:
		return -ENOTTY;
	}
	if (!err && (_IOC_DIR(command) & _IOC_READ) &&
	    copy_to_user(user, &with, _IOC_SIZE(command)))
		return -EFAULT;
	return err;
}

static void lamina_area_open(struct vm_area_struct *area)
{
	struct lamina_share *share = area->vm_private_data;

	atomic_inc(&share->uses);
}

static void lamina_area_close(struct vm_area_struct *area)
{
	struct lamina_share *share = area->vm_private_data;

	atomic_dec(&share->uses);
}

static const struct vm_operations_struct lamina_area = {
	.open = lamina_area_open,
	.close = lamina_area_close,
};

static int lamina_mmap(struct file *file, struct vm_area_struct *area)
{
	struct lamina_file *open = file->private_data;
	struct lamina *lamina = open->lamina;
	u64 length = area->vm_end - area->vm_start;
	u64 at = (u64)area->vm_pgoff << PAGE_SHIFT;
	struct lamina_share *share;
	bool views;
	int err;

	if (!(area->vm_flags & VM_SHARED))
		return -EINVAL;
	mutex_lock(&lamina->lock);
	share = lamina_find(open, at, length);
	views = share && share->mapping->window == LAMINA_VIEWS;
	if (lamina->gone) {
		err = -ENODEV;
	} else if (!share) {
		err = -ENXIO;
	} else if (views && (area->vm_flags & VM_WRITE)) {
		err = -EACCES;
	} else {
		if (views)
			vm_flags_clear(area, VM_MAYWRITE);
		area->vm_private_data = share;
		area->vm_ops = &lamina_area;
		err = remap_pfn_range(area, area->vm_start,
				      PHYS_PFN(lamina->region.addr + at),
				      length, area->vm_page_prot);
		if (!err)
			atomic_inc(&share->uses);
	}
	mutex_unlock(&lamina->lock);
	return err;
}

const struct file_operations lamina_fops = {
	.owner = THIS_MODULE,
	.open = lamina_open,
	.release = lamina_close,
	.unlocked_ioctl = lamina_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = lamina_mmap,
};
