//! The faults that a sandbox must contain. All of it is safe Rust.

use std::{
    hint::black_box,
    io::{self, Write},
};

/// Never ends and never calls the host.
pub fn spin() -> ! {
    let mut turns = 0_u64;
    loop {
        turns = black_box(turns.wrapping_add(1));
    }
}

/// Takes and touches memory until there is none.
pub fn eat_memory() -> ! {
    let mut eaten = Vec::new();
    loop {
        eaten.push(black_box(vec![1_u8; 1024 * 1024]));
    }
}

/// Recurses without end. Its frames are small and hold no address, so it is the engine's stack that runs out, and not the
/// part of linear memory that Rust keeps addressable locals in.
pub fn overflow_stack() -> ! {
    #[expect(unconditional_recursion, reason = "it is what this is for")]
    fn deeper(depth: u64) -> u64 {
        // The addition after the call keeps it from being a loop.
        deeper(depth + 1).wrapping_mul(depth | 1) + 1
    }
    let depth = deeper(0);
    unreachable!("the stack held {depth} frames")
}

/// Runs over the lower end of linear memory: Rust's stack of addressable locals lies there, so frames that are large enough
/// take its pointer below zero, which is an address beyond the end of every memory.
pub fn read_out_of_bounds() -> ! {
    fn deeper(depth: u8) -> u64 {
        let frame = black_box([depth; 256 * 1024]);
        let below = if depth == u8::MAX { 0 } else { deeper(depth + 1) };
        below + u64::from(black_box(&frame)[usize::from(depth)])
    }
    let sum = deeper(0);
    unreachable!("64 MiB of frames fitted, sum {sum}")
}

/// Prints so many bytes, in lines of 1 KiB.
pub fn flood_stdout(bytes: usize) -> io::Result<()> {
    let mut line = [b'x'; 1024];
    line[1023] = b'\n';
    let mut stdout = io::stdout().lock();
    for _ in 0..bytes.div_ceil(line.len()) {
        stdout.write_all(&line)?;
    }
    stdout.flush()
}

/// Prints what is no text, and a NUL.
pub fn print_bad_utf8() -> io::Result<()> {
    let mut stderr = io::stderr().lock();
    stderr.write_all(b"not text: \xff\xfe\xed\xa0\x80, and a NUL: \0\n")?;
    stderr.flush()
}

/// Takes, touches and gives back memory.
pub fn allocate(bytes: usize) {
    drop(black_box(vec![1_u8; bytes]));
}
