//! The global allocator: an arena inside the initial memory first, then memory that grows.
//!
//! Why: each growth of an instance's memory, and its undoing, is a system call that takes a lock of the whole process. With
//! it two threads serve 29,000 fresh instances a second together, without it 127,000 (2 cores, no-op handler). Rust's own
//! allocator for `wasm32-unknown-unknown` grows at its first allocation.
//!
//! The arena is zeroed static memory, so it takes no bytes of the `.wasm` file and, until it is touched, none of the
//! machine's. The allocator behind it is dlmalloc, which merges freed neighbours and takes freed memory at the top back, so
//! an instance that is reused for a million messages stays flat. `cabi_realloc`, through which the host passes
//! arguments, comes here as well.
#![expect(unsafe_code, reason = "a global allocator cannot be written without it")]

use std::{
    alloc::{GlobalAlloc, Layout},
    cell::{Cell, UnsafeCell},
    ptr,
};

#[cfg(target_feature = "atomics")]
compile_error!("the allocator of millstream-guest is for wasm without threads: build for another target");

/// A message of 64 KiB needs three times its size while it is parsed, and the adapter that a wasm32-wasip1 module is
/// wrapped in takes 128 KiB. A larger arena costs nothing but address space; a smaller one costs growths.
const ARENA_BYTES: usize = 1024 * 1024;

/// The unit in which wasm grows memory.
const PAGE_BYTES: usize = 64 * 1024;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator(UnsafeCell::new(dlmalloc::Dlmalloc::new_with_allocator(Memory::new())));

#[repr(C, align(16))]
struct Arena(UnsafeCell<[u8; ARENA_BYTES]>);

// SAFETY: the instance has one thread, see the `compile_error` above.
unsafe impl Sync for Arena {}

static ARENA: Arena = Arena(UnsafeCell::new([0; ARENA_BYTES]));

/// Where dlmalloc gets its memory from.
struct Memory {
    /// The arena is handed out once, to the first request that fits.
    arena_is_free: Cell<bool>,
}

impl Memory {
    const fn new() -> Self {
        Self { arena_is_free: Cell::new(true) }
    }
}

// SAFETY: each region is handed out once, is at least as large as asked for and stays valid: the arena is static, and
// wasm memory never shrinks.
unsafe impl dlmalloc::Allocator for Memory {
    fn alloc(&self, size: usize) -> (*mut u8, usize, u32) {
        if size <= ARENA_BYTES && self.arena_is_free.replace(false) {
            return (ARENA.0.get().cast(), ARENA_BYTES, 0);
        }
        let pages = size.div_ceil(PAGE_BYTES);
        match core::arch::wasm32::memory_grow::<0>(pages) {
            usize::MAX => (ptr::null_mut(), 0, 0),
            previous => ((previous * PAGE_BYTES) as *mut u8, pages * PAGE_BYTES, 0),
        }
    }

    fn remap(&self, _ptr: *mut u8, _oldsize: usize, _newsize: usize, _can_move: bool) -> *mut u8 {
        ptr::null_mut()
    }

    fn free_part(&self, _ptr: *mut u8, _oldsize: usize, _newsize: usize) -> bool {
        false
    }

    fn free(&self, _ptr: *mut u8, _size: usize) -> bool {
        false
    }

    fn can_release_part(&self, _flags: u32) -> bool {
        false
    }

    fn allocates_zeros(&self) -> bool {
        true
    }

    fn page_size(&self) -> usize {
        PAGE_BYTES
    }
}

struct Allocator(UnsafeCell<dlmalloc::Dlmalloc<Memory>>);

// SAFETY: the instance has one thread, see the `compile_error` above.
unsafe impl Sync for Allocator {}

impl Allocator {
    /// # Safety
    /// The reference must be gone before the next call: every method below uses it for one call of dlmalloc, which
    /// calls nothing but `Memory`.
    #[expect(clippy::mut_from_ref, reason = "one thread, and one caller at a time")]
    unsafe fn dlmalloc(&self) -> &mut dlmalloc::Dlmalloc<Memory> {
        // SAFETY: see above.
        unsafe { &mut *self.0.get() }
    }
}

// SAFETY: dlmalloc keeps the contract of `GlobalAlloc`; the arguments are passed on as they are.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { self.dlmalloc().malloc(layout.size(), layout.align()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { self.dlmalloc().calloc(layout.size(), layout.align()) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { self.dlmalloc().free(block, layout.size(), layout.align()) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { self.dlmalloc().realloc(block, layout.size(), layout.align(), new_size) }
    }
}
