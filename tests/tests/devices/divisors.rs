//! Division by numbers that loops do not change, which a GPU computes by multiplication: every device against Rust's own.

use tilewright::prelude::*;
use tilewright_tests::on_device::devices;

/// Quotients and remainders of all dividends by the divisor of a program, twice: of any sign, and of those that are known not
/// to be negative (−1 stands for others).
#[kernel]
fn divide_all(
    dividends: In<i32>,
    divisors: In<i32>,
    quotients: Out<i32>,
    rests: Out<i32>,
    of_positive: Out<i32>,
    count: i32,
) {
    let divisor = load(divisors + program_id(0));
    let positive = maximum(divisor, 0);
    for i in range(0, count) {
        let dividend = load(dividends + i);
        let at = program_id(0) * count + i;
        store(quotients + at, dividend / divisor);
        store(rests + at, dividend % divisor);
        let known = maximum(dividend, 0);
        let sum = known / positive + known % positive;
        store(of_positive + at, where_((dividend >= 0) & (divisor >= 0), sum, -1));
    }
}

/// A divisor that is constant in the inner loop and changes in the outer one.
#[kernel]
fn digits(x: In<i32>, y: Out<i32>, count: i32) {
    let mut power = scalar::<i32>(1);
    for place in range(0, 9) {
        for i in range(0, count) {
            store(y + (place * count + i), load(x + i) / power % 10);
        }
        power = power * 10;
    }
}

#[test]
fn quotients_and_rests_are_those_of_division() {
    let mut numbers =
        vec![0, 1, 2, 3, 7, 10, 641, 65_535, 65_536, 65_537, 1 << 30, (1 << 30) + 1, i32::MAX - 1, i32::MAX];
    numbers.extend(numbers.clone().iter().map(|n| -n));
    numbers.push(i32::MIN);
    let mut x = 1u32;
    numbers.extend((0..20).map(|_| {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        x as i32 >> (x >> 27)
    }));
    let pairs: Vec<(i32, i32)> = numbers.iter().flat_map(|&d| numbers.iter().map(move |&n| (n, d))).collect();
    let by = |d: i32, f: fn(i32, i32) -> i32, n: i32| if d == 0 { 0 } else { f(n, d) };
    let quotient = |&(n, d): &(i32, i32)| by(d, i32::wrapping_div, n);
    let rest = |&(n, d): &(i32, i32)| by(d, i32::wrapping_rem, n);
    let positive = |pair: &(i32, i32)| if pair.0 >= 0 && pair.1 >= 0 { quotient(pair) + rest(pair) } else { -1 };
    for device in devices() {
        let n = Buffer::from_slice(&device, &numbers).unwrap();
        let [mut q, mut r, mut p] = [(); 3].map(|()| Buffer::<i32>::poisoned(&device, pairs.len()).unwrap());
        DivideAll {
            dividends: &n,
            divisors: &n,
            quotients: &mut q,
            rests: &mut r,
            of_positive: &mut p,
            count: numbers.len() as i32,
        }
        .launch(&device, numbers.len())
        .unwrap();
        assert_eq!(q.to_vec().unwrap(), pairs.iter().map(quotient).collect::<Vec<_>>(), "{device}");
        assert_eq!(r.to_vec().unwrap(), pairs.iter().map(rest).collect::<Vec<_>>(), "{device}");
        assert_eq!(p.to_vec().unwrap(), pairs.iter().map(positive).collect::<Vec<_>>(), "{device}");
    }
}

#[test]
fn divisors_may_change_in_outer_loops() {
    let x = [0, 5, 123_456_789, -987_654_321, i32::MAX, i32::MIN];
    let want: Vec<i32> = (0..9).flat_map(|place| x.map(|x| x / 10i32.pow(place) % 10)).collect();
    for device in devices() {
        let input = Buffer::from_slice(&device, &x).unwrap();
        let mut y = Buffer::<i32>::poisoned(&device, want.len()).unwrap();
        Digits { x: &input, y: &mut y, count: x.len() as i32 }.launch(&device, 1).unwrap();
        assert_eq!(y.to_vec().unwrap(), want, "{device}");
    }
}

/// The compiled code has one division per divisor, before the loop.
#[test]
fn loops_do_not_divide() {
    let ptx = DivideAll::compile_for(GpuArch::Sm90a).compile().unwrap();
    let ptx = std::str::from_utf8(ptx.bytes()).unwrap();
    let divisions = ptx.matches("\tdiv.").count() + ptx.matches("\trem.").count();
    assert_eq!(divisions, 2, "{ptx}");
    assert!(ptx.rfind("\tdiv.").unwrap() < ptx.find("\n$L").unwrap(), "{ptx}");
}
